"""Self-contained HTML pages: the report of a job, and what other pages are built from."""

from quant_spec.html import escaped as escaped
from quant_spec.page.charts import Bar as Bar
from quant_spec.page.charts import Point as Point
from quant_spec.page.charts import bars as bars
from quant_spec.page.charts import panels as panels
from quant_spec.page.frame import Cell as Cell
from quant_spec.page.frame import Column as Column
from quant_spec.page.frame import document as document
from quant_spec.page.frame import search_form as search_form
from quant_spec.page.frame import section as section
from quant_spec.page.frame import table as table
from quant_spec.page.report_page import report_page as report_page
