"""Reads the text that clang writes for an AMD GPU (`-S`): kernels, their instructions, labels and descriptors."""

from __future__ import annotations

import re
from dataclasses import dataclass

from amdgcn.errors import UnsupportedError

ENCODINGS = ("_e32", "_e64", "_sdwa", "_dpp")
_MODIFIER = re.compile(r"\s([a-z][a-z0-9_]*):(\[[^\]]*\]|[^\s,]+)")
_LABEL = re.compile(r"^([A-Za-z_.$][\w.$]*):")
_LINES = re.MULTILINE | re.DOTALL
# Settings whose other values change what instructions mean.
REQUIRED = {
    "amdhsa_float_round_mode_32": 0,
    "amdhsa_float_round_mode_16_64": 0,
    "amdhsa_float_denorm_mode_32": 3,
    "amdhsa_float_denorm_mode_16_64": 3,
    "amdhsa_fp16_overflow": 0,
    "amdhsa_tg_split": 0,
    "amdhsa_uses_dynamic_stack": 0,
    "amdhsa_user_sgpr_kernarg_preload_length": 0,
}


@dataclass(frozen=True)
class Instruction:
    """One instruction: its name without the encoding's suffix, operands as written, modifiers by name."""

    name: str
    encoding: str
    operands: tuple[str, ...]
    modifiers: dict[str, str]
    line: int
    text: str

    def refuse(self, what: str) -> UnsupportedError:
        """Return the error that says what of this instruction is not modelled."""
        return UnsupportedError(f"line {self.line}: {what}: {self.text}")


@dataclass(frozen=True)
class Kernel:
    """One kernel: its code, where its labels point to, and its descriptor's numbers by directive."""

    name: str
    target: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    descriptor: dict[str, int]

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory a block."""
        return self.descriptor["amdhsa_group_segment_fixed_size"]

    @property
    def private_bytes(self) -> int:
        """Bytes of private memory a lane."""
        return self.descriptor["amdhsa_private_segment_fixed_size"]

    @property
    def argument_bytes(self) -> int:
        """Bytes of the kernel's arguments."""
        return self.descriptor["amdhsa_kernarg_size"]

    @property
    def vector_registers(self) -> int:
        """Vector registers a lane."""
        return self.descriptor["amdhsa_next_free_vgpr"]

    def check(self) -> None:
        """Raise UnsupportedError if the descriptor asks for a mode that the interpreter does not model."""
        for setting, value in REQUIRED.items():
            found = self.descriptor.get(setting, value)
            if found != value:
                raise UnsupportedError(f"kernel {self.name}: .{setting} is {found}, modelled is {value}")


def split_operands(text: str) -> list[str]:
    """Split at commas outside brackets."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(text):
        if character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:index])
            start = index + 1
    parts.append(text[start:])
    return [part.strip() for part in parts if part.strip()]


def parse_instruction(text: str, line: int) -> Instruction:
    """Parse one line of code that has no comment."""
    mnemonic, _, rest = text.strip().partition(" ")
    encoding = next((suffix for suffix in ENCODINGS if mnemonic.endswith(suffix)), "")
    name = mnemonic.removesuffix(encoding)
    modifiers: dict[str, str] = {}
    if name not in {"s_waitcnt", "s_nop"}:
        for match in _MODIFIER.finditer(" " + rest):
            modifiers[match[1]] = match[2]
        rest = _MODIFIER.sub("", " " + rest)
    operands = split_operands(rest)
    if operands:
        last, *flags = operands[-1].split()
        operands[-1] = last
        modifiers.update(dict.fromkeys(flags, "1"))
    return Instruction(name, encoding, tuple(operands), modifiers, line, text.strip())


def _number(text: str) -> int | None:
    try:
        return int(text, 0)
    except ValueError:
        return None


class Assembly:
    """An assembly text: the kernels in it, each parsed when it is asked for (a file holds dozens of long ones)."""

    def __init__(self, text: str) -> None:
        self._text = text
        target = re.search(r'^\s*\.amdgcn_target "[^"]*-([^"-]+)"', text, re.MULTILINE)
        if target is None:
            raise UnsupportedError("the text names no AMD GPU target")
        self.target = target[1]
        self._descriptors = {
            match[1]: match[2]
            for match in re.finditer(r"^\s*\.amdhsa_kernel (\S+)\n(.*?)^\s*\.end_amdhsa_kernel", text, _LINES)
        }

        self._starts = {match[1]: match.end() for match in re.finditer(r"^([A-Za-z_$][\w.$]*):", text, re.MULTILINE)}

    @property
    def names(self) -> list[str]:
        """Names of the kernels, mangled."""
        return list(self._descriptors)

    def code(self, name: str) -> str:
        """Return the text of a kernel's instructions and labels.

        Raises:
            KeyError: there is none of this name.
        """
        start, end = self._range(name)
        return self._text[start:end]

    def _range(self, name: str) -> tuple[int, int]:
        if name not in self._descriptors:
            raise KeyError(name)
        if name not in self._starts:
            raise UnsupportedError(f"kernel {name} has no code")
        start = self._starts[name]
        return start, self._text.index(".Lfunc_end", start)

    def metadata(self, name: str) -> dict[str, int]:
        """Return the numbers that the compiler tells the runtime about a kernel, for example `vgpr_spill_count`."""
        at = self._text.rindex(f"    .name:           {name}\n")
        first = self._text.rfind("\n  - ", 0, at)
        last = self._text.find("\n  - ", at)
        block = self._text[first : last if last >= 0 else None]
        return {match[1]: int(match[2]) for match in re.finditer(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", block, re.MULTILINE)}

    def kernel(self, name: str) -> Kernel:
        """Parse one kernel.

        Raises:
            KeyError: there is none of this name.
        """
        descriptor: dict[str, int] = {}
        for line in self._descriptors[name].splitlines():
            directive, _, value = line.strip()[1:].partition(" ")
            found = _number(value)
            if found is not None:
                descriptor[directive] = found
        start, end = self._range(name)
        first = self._text.count("\n", 0, start) + 1
        instructions: list[Instruction] = []
        labels: dict[str, int] = {}
        for number, raw in enumerate(self._text[start:end].split("\n"), start=first):
            code = raw.partition(";")[0].strip()
            if label := _LABEL.match(code):
                labels[label[1]] = len(instructions)
            elif code and not code.startswith((".", ":")):
                instructions.append(parse_instruction(code, number))
        return Kernel(name, self.target, tuple(instructions), labels, descriptor)
