"""Parsers of what `npu-smi` prints. Pure: text in, values out.

Nothing here reads a label that a translation could change, or counts columns of characters: a row is known by its numbers,
its PCI address and its cells. Formats: the two-line table of Atlas A2 (one chip a card) and of Atlas A3 (two chips a card,
with a column for the physical id), drivers 23.0 to 25.5.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

HEALTHY = frozenset({"OK", "正常"})
LINKS = frozenset({"HCCS", "HCCS_SW", "SIO"})
"""Direct paths between two chips; `SIO` joins the two of one package. PIX, PXB, PHB and SYS go through PCIe."""

_BUS = re.compile(r"^[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-9A-Fa-f]$")
_USAGE = re.compile(r"(\d+)\s*/\s*(\d+)")
_TITLE = re.compile(r"npu-smi\s+(\S+)\s+\S+?\s*[:\uff1a]\s*(\S+)")
_MAPPED = re.compile(r"^\s*(\d+)\s+(\d+)\s+(\d+|-|N/A|NA)\s+(?:(\d+|-|N/A|NA)\s+)?(\S.*?)\s*$")
_LABEL = re.compile(r"^(?:NPU|Phy-ID)(\d+)$", re.IGNORECASE)
_CPUS = re.compile(r"^\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*$")
_FIELD = re.compile(r"^\s*(.+?)\s*[:\uff1a]\s*(.*?)\s*$")


@dataclass(frozen=True, slots=True)
class Chip:
    """A row pair of `npu-smi info`: card, chip on the card, `physical` id where the table has it, HBM in bytes."""

    card: int
    chip: int
    name: str
    health: str
    bus: str | None
    memory_bytes: int
    physical: int | None = None


@dataclass(frozen=True, slots=True)
class MappedChip:
    """A compute chip of `npu-smi info -m`: `logical` is what masks count, `physical` the host's number."""

    card: int
    chip: int
    logical: int
    physical: int
    name: str


@dataclass(frozen=True, slots=True)
class Topology:
    """`npu-smi info -t topo`: kinds of path by pair of physical ids, and the processors near a chip where they are told."""

    paths: Mapping[tuple[int, int], str]
    affinity: Mapping[int, str]


def versions(info: str) -> tuple[str | None, str | None]:
    """(version of the tool, version of the driver) in the table's title."""
    found = _TITLE.search(info)
    return (found[1], found[2]) if found else (None, None)


def chips(info: str) -> tuple[Chip, ...]:
    """Every chip of the first table of `npu-smi info`; the table of processes has four cells a row and is passed over.

    A card's row stands before its chips: once a card, or once a chip.
    """
    found: list[Chip] = []
    card: tuple[int, str, str] | None = None
    for cells in _rows(info):
        if len(cells) != 3:
            continue
        words = cells[0].split()
        if not words or not words[0].isdigit():
            continue
        if not _is_address(cells[1]):
            if len(words) > 1 and not words[1].isdigit():
                card = (int(words[0]), " ".join(words[1:]), cells[1] or "unknown")
            continue
        if card is not None:
            bus = cells[1] if _BUS.match(cells[1]) else None
            physical = int(words[1]) if len(words) > 1 and words[1].isdigit() else None
            found.append(Chip(card[0], int(words[0]), card[1], card[2], bus, _memory(cells[2]), physical))
    return tuple(found)


def mapping(text: str) -> tuple[MappedChip, ...]:
    """Compute chips of `npu-smi info -m`, by logical id. Management controllers have no logical id and are left out.

    Without a column of physical ids (one chip a card) the card's number is the physical id.
    """
    found: list[MappedChip] = []
    for line in text.splitlines():
        row = _MAPPED.match(line)
        if row is None or not row[3].isdigit():
            continue
        physical = row[4] if row[4] and row[4].isdigit() else row[1]
        found.append(MappedChip(int(row[1]), int(row[2]), int(row[3]), int(physical), row[5]))
    return tuple(sorted(found, key=lambda chip: chip.logical))


def topology(text: str) -> Topology:
    """The matrix of paths. Its header names the columns; a last column, where there is one, lists processors."""
    columns: list[int] = []
    paths: dict[tuple[int, int], str] = {}
    affinity: dict[int, str] = {}
    for line in text.splitlines():
        words = line.split()
        labels = [int(label[1]) for word in words if (label := _LABEL.match(word))]
        if len(labels) > 1 or (labels and not columns):
            columns = labels
        elif columns and labels and _LABEL.match(words[0]):
            row, cells = labels[0], words[1:]
            paths |= {(row, column): kind for column, kind in zip(columns, cells, strict=False) if column != row}
            if len(cells) > len(columns) and _CPUS.match(cells[-1]):
                affinity[row] = cells[-1]
    return Topology(paths, affinity)


def fields(text: str) -> dict[str, str]:
    """`Label : value` lines, as `-t board`, `-l` and `-t spod-info` print them. A label's first value stays."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        if row := _FIELD.match(line):
            found.setdefault(row[1], row[2])
    return found


def field(values: Mapping[str, str], *labels: str) -> str | None:
    """The value under the first of several spellings of a label; `NA` and emptiness are None."""
    value = next((values[label] for label in labels if label in values), "")
    return None if value in ("", "NA", "N/A", "-") else value


def translated(info: str) -> bool:
    """Whether the tool answered in another language than the one it was asked for."""
    return not info.isascii()


def _rows(text: str) -> Iterator[list[str]]:
    for line in text.splitlines():
        if line.lstrip().startswith("|"):
            yield [cell.strip() for cell in line.strip().strip("|").split("|")]


def _is_address(cell: str) -> bool:
    return bool(_BUS.match(cell)) or cell in ("NA", "N/A")


def _memory(cell: str) -> int:
    """Bytes of HBM: the last `used / total` of the row, in MiB."""
    pairs = _USAGE.findall(cell)
    return int(pairs[-1][1]) * 2**20 if pairs else 0
