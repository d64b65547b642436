"""Writes what `npu-smi` prints, from a profile. Formats follow the tool of drivers 24.1 to 25.5; numbers are made up.

Used by the fake executable (`npu_smi_program`), whose process should start fast: it imports nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    Profile = Mapping[str, Any]

LABELS: Mapping[str, Mapping[str, str]] = {
    "en": {
        "version": "Version:",
        "card": "NPU   Name",
        "chip": "Chip",
        "health": "Health",
        "bus": "Bus-Id",
        "power": "Power(W)    Temp(C)           Hugepages-Usage(page)",
        "usage": "AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)",
        "process": "NPU     Chip",
        "pid": "Process id",
        "name": "Process name",
        "memory": "Process memory(MB)",
        "idle": "No running processes found in NPU",
        "mapping": "NPU ID|Chip ID|Chip Logic ID|Chip Phy-ID|Chip Name",
        "board": "NPU ID|Software Version|Firmware Version|Compatibility|PCIe Bus Info|Chip Count",
        "total": "Total Count|NPU ID|Chip Count",
        "affinity": "CPU Affinity",
    },
    "zh": {
        "version": "版本\uff1a",
        "card": "NPU   名称",
        "chip": "芯片",
        "health": "健康状态",
        "bus": "总线地址",
        "power": "功率(W)    温度(C)           大页使用(页)",
        "usage": "AICore(%)   内存使用(MB)  片上内存使用(MB)",
        "process": "NPU     芯片",
        "pid": "进程号",
        "name": "进程名",
        "memory": "进程内存(MB)",
        "idle": "没有运行的进程 NPU",
        "mapping": "NPU 编号|芯片编号|芯片逻辑编号|芯片物理编号|芯片名称",
        "board": "NPU 编号|软件版本|固件版本|兼容性|PCIe 总线|芯片数量",
        "total": "总数|NPU 编号|芯片数量",
        "affinity": "CPU 亲和性",
    },
}
_WIDE = "+" + "-" * 96 + "+"
_RULE = "+" + "-" * 27 + "+" + "-" * 15 + "+" + "-" * 52 + "+"
_DOUBLE = _RULE.replace("-", "=")


def info(profile: Profile) -> str:
    """The two-line table: a card's row and a chip's row, with the physical id where a card has several chips."""
    words, several = LABELS[profile["language"]], profile["chips_per_card"] > 1
    title = f"| npu-smi {profile['driver']:<24} {words['version']} {profile['driver']}"
    lines = [_WIDE, f"{title:<97}|", _RULE]
    lines.append(_row(words["card"], words["health"], words["power"]))
    lines.append(_row(words["chip"] + ("  Phy-ID" if several else ""), words["bus"], words["usage"]))
    lines.append(_DOUBLE)
    for card in cards(profile):
        for position, chip in enumerate(card["chips"]):
            if position:
                lines.append(_WIDE)
            power = f"{chip['power_w']:.1f}" if position == 0 else "-"
            lines.append(
                _row(f"{card['id']:<5} {chip['name']}", chip["health"], f"{power:<11} {chip['temperature_c']:<17} 0    / 0")
            )
            label = f"{position:<5} {chip['physical']}" if several else str(position)
            used = f"{chip['used_mib']:<5}/ {chip['memory_mib']}"
            lines.append(_row(label, chip["bus"], f"{chip['busy']:<11} 0    / 0          {used}"))
        lines.append(_DOUBLE)
    return "\n".join([*lines, *_processes(profile, words), ""])


def _row(first: str, second: str, third: str) -> str:
    return f"| {first:<26}| {second:<14}| {third:<51}|"


def _processes(profile: Profile, words: Mapping[str, str]) -> list[str]:
    lines = [_RULE, f"| {words['process']:<26}| {words['pid']:<14}| {words['name']:<25}| {words['memory']:<24}|", _DOUBLE]
    for card in cards(profile):
        running = [p for p in profile["processes"] if p["card"] == card["id"]]
        for p in running:
            lines.append(f"| {p['card']:<7} {p['chip']:<18}| {p['pid']:<14}| {p['name']:<25}| {p['memory_mib']:<24}|")
        if not running:
            lines.append(f"| {words['idle'] + ' ' + str(card['id']):<95}|")
        lines.append(_DOUBLE)
    return lines


def mapping(profile: Profile) -> str:
    """Ids of every chip, and of the management controller that each card has beside them."""
    several = profile["chips_per_card"] > 1
    names = LABELS[profile["language"]]["mapping"].split("|")
    rows: list[Sequence[object]] = [names if several else [name for i, name in enumerate(names) if i != 3]]
    for card in cards(profile):
        for position, chip in enumerate(card["chips"]):
            physical = (chip["physical"],) if several else ()
            rows.append((card["id"], position, chip["logical"], *physical, chip["mapped_name"]))
        controller = len(card["chips"])
        rows.append((card["id"], controller, "-", *(("-",) if several else ()), "Mcu"))
    return "".join("\t" + "".join(f"{cell!s:<30} " for cell in row).rstrip() + "\n" for row in rows)


def topology(profile: Profile) -> str:
    """The matrix of paths; only servers with one chip a card list processors."""
    several = profile["chips_per_card"] > 1
    words = LABELS[profile["language"]]
    chips = [chip for card in cards(profile) for chip in card["chips"]]
    label = "Phy-ID" if several else "NPU"
    header = "\t   " + "".join(f"{label + str(chip['physical']):<11}" for chip in chips)
    lines = [header.rstrip() if several else header + words["affinity"]]
    for chip in chips:
        cells = "".join(f"{_path(profile, chip, other):<11}" for other in chips)
        near = "" if several else chip["cpus"]
        lines.append(f"{label + str(chip['physical']):<11}{cells}{near}".rstrip())
    legend = ("X    = Self", "SYS  = Path traversing PCIe and NUMA nodes.", "HCCS = Connection traversing HCCS.")
    further = ("SIO  = Path traversing the SIO bus", "HCCS_SW = Connection traversing HCCS through a switch") if several else ()
    return "\n".join([*lines, "", "Legend:", "", *(f"  {line}" for line in (*legend, *further)), ""])


def _path(profile: Profile, chip: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    if chip["physical"] == other["physical"]:
        return "X"
    if profile["chips_per_card"] == 1:
        return "HCCS"
    return "SIO" if chip["card"] == other["card"] else "HCCS_SW"


def listing(profile: Profile) -> str:
    total, card_id, count = LABELS[profile["language"]]["total"].split("|")
    found = cards(profile)
    blocks = [f"{_field(total, len(found))}\n"]
    blocks += [f"{_field(card_id, c['id'])}{_field(count, len(c['chips']))}\n" for c in found]
    return "".join(blocks)


def board(profile: Profile, card: Mapping[str, Any]) -> str:
    labels = LABELS[profile["language"]]["board"].split("|")
    values = (card["id"], profile["driver"], profile["firmware"], "OK", card["chips"][0]["bus"], len(card["chips"]))
    return "".join(_field(label, value) for label, value in zip(labels, values, strict=True))


def super_pod(profile: Profile, card: Mapping[str, Any], chip: Mapping[str, Any]) -> str:
    pod = profile["super_pod"]
    values = {
        "SDID": pod["first_sdid"] + chip["physical"],
        "Super Pod Size": pod["size"],
        "Super Pod ID": pod["id"],
        "Server Index": pod["server"],
    }
    return "".join(_field(label, value) for label, value in values.items())


def _field(label: str, value: object) -> str:
    return f"\t{label:<30} : {value}\n"


def cards(profile: Profile) -> list[dict[str, Any]]:
    """Cards with their chips: the profile's defaults, overridden by what it says of single chips."""
    each = profile["chips_per_card"]
    found: list[dict[str, Any]] = []
    for card in range(profile["cards"]):
        chips: list[dict[str, Any]] = []
        for position in range(each):
            number = card * each + position
            own = profile["chips"].get(str(number), {})
            buses = profile["buses"]
            chips.append(
                {
                    "card": card,
                    "physical": number,
                    "logical": number,
                    "bus": buses[number],
                    "cpus": profile["cpu_affinity"][number] if profile["cpu_affinity"] else "",
                    **profile["chip"],
                    **own,
                }
            )
        found.append({"id": card, "chips": chips})
    return found
