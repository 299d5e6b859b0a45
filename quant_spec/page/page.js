"use strict";

// The page is complete without this script, which adds a search over the rows of a table and sorts by a column.
(() => {
  const search = document.getElementById("search");
  const table = document.getElementById("layers");
  if (!search || !table) {
    return;
  }
  const form = search.closest("form");
  const count = document.getElementById("count");
  const body = table.tBodies[0];
  let rows = Array.from(body.rows);
  const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));

  const filter = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => words.every((word) => texts.get(row).includes(word)));
    body.replaceChildren(...found);
    count.textContent = `${found.length} of ${rows.length} layers`;
  };

  const remember = () => {
    const fragment = search.value ? `#q=${encodeURIComponent(search.value)}` : "#";
    history.replaceState(null, "", fragment);
  };

  const recall = () => {
    const match = /^#q=(.*)$/.exec(location.hash);
    if (!match) {
      return;
    }
    try {
      search.value = decodeURIComponent(match[1]);
    } catch {
      search.value = match[1];
    }
    filter();
  };

  const valueOf = (row, index) => {
    const cell = row.cells[index];
    const number = cell.dataset.value;
    return number === undefined ? cell.textContent : Number(number);
  };

  const compare = (left, right) =>
    typeof left === "number" && typeof right === "number"
      ? left - right
      : String(left).localeCompare(String(right), "en", { numeric: true });

  const sortBy = (head, index) => {
    const descending = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentElement.cells) {
      other.removeAttribute("aria-sort");
    }
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
    const sign = descending ? -1 : 1;
    rows = rows.slice().sort((a, b) => sign * compare(valueOf(a, index), valueOf(b, index)));
    filter();
  };

  Array.from(table.tHead.rows[0].cells).forEach((head, index) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = head.textContent;
    button.addEventListener("click", () => sortBy(head, index));
    head.replaceChildren(button);
  });

  search.addEventListener("input", () => {
    filter();
    remember();
  });
  form.addEventListener("submit", (event) => event.preventDefault());
  window.addEventListener("hashchange", recall);
  document.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement !== search && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      search.focus();
    } else if (event.key === "Escape" && document.activeElement === search) {
      search.value = "";
      filter();
      remember();
    }
  });

  form.hidden = false;
  filter();
  recall();
})();
