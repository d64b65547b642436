"""Parsers of `npu-smi`, on texts written out here and on what the fake tool prints."""

from __future__ import annotations

import pytest

from vime_ascend import smi_text
from vime_ascend.chips import A2, A3, generation_of
from vime_ascend.testing import smi_output
from vime_ascend.testing.fake_npu_smi import load_profile
from vime_ascend.versions import older, parse

A2_TABLE = """\
+------------------------------------------------------------------------------------------------+
| npu-smi 24.1.rc1.b030            Version: 24.1.rc1.b030                                        |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
| 4     910B2C              | OK            | 87.8        31                0    / 0             |
| 0                         | 0000:52:00.0  | 0           0    / 0          60156/ 65536         |
+===========================+===============+====================================================+
| 5     910B2C              | Warning       | 87.8        31                0    / 0             |
| 0                         | 0000:53:00.0  | 0           0    / 0          3406 / 65536         |
+===========================+===============+====================================================+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| 5       0                 | 2290156       | VLLMEngineCore           | 56630                   |
+===========================+===============+====================================================+
"""

WIDE_A3_TABLE = """\
| npu-smi 25.5.1 Version: 25.5.1 |
| 4 Ascend910 | OK | 170.7 49 0 / 0 |
| 0 8 | 0000:8D:00.0 | 0 0 / 0 51255/ 65536 |
| 4 Ascend910                           | OK                    | - 51 0 / 0 |
| 1 9                                   | 0000:8F:00.0          | 0 0 / 0 45292/ 65536 |
"""

ONE_ROW_A_CARD = """\
| 0     910C                | OK            | 210.8       52                0    / 0             |
| 0                         | 0000:C1:00.0  | 30          0    / 0          1024 / 65536         |
| 1                         | 0000:C1:00.1  | 70          0    / 0          2048 / 65536         |
"""


def test_one_chip_a_card() -> None:
    first, second = smi_text.chips(A2_TABLE)
    assert (first.card, first.chip, first.name, first.health, first.bus) == (4, 0, "910B2C", "OK", "0000:52:00.0")
    assert first.memory_bytes == 65536 * 2**20
    assert first.physical is None
    assert (second.card, second.health) == (5, "Warning")
    assert smi_text.versions(A2_TABLE) == ("24.1.rc1.b030", "24.1.rc1.b030")


def test_two_chips_a_card_whatever_the_width() -> None:
    found = smi_text.chips(WIDE_A3_TABLE)
    assert [(c.card, c.chip, c.physical, c.bus) for c in found] == [(4, 0, 8, "0000:8D:00.0"), (4, 1, 9, "0000:8F:00.0")]


def test_a_card_row_may_stand_for_several_chips() -> None:
    assert [(c.card, c.chip, c.name) for c in smi_text.chips(ONE_ROW_A_CARD)] == [(0, 0, "910C"), (0, 1, "910C")]


@pytest.mark.parametrize("text", ["", "dcmi model initialized failed\n", "| garbage |\n| x y | z | w |\n"])
def test_text_without_chips_gives_none(text: str) -> None:
    assert smi_text.chips(text) == ()
    assert smi_text.mapping(text) == ()
    assert smi_text.topology(text).paths == {}


def test_the_mapping_leaves_controllers_out_and_knows_both_forms() -> None:
    one = "\tNPU ID  Chip ID  Chip Logic ID  Chip Name\n\t8  0  0  Ascend 910B3\n\t8  1  -  Mcu\n\t9  0  1  Ascend 910B3\n"
    assert [(m.card, m.chip, m.logical, m.physical, m.name) for m in smi_text.mapping(one)] == [
        (8, 0, 0, 8, "Ascend 910B3"),
        (9, 0, 1, 9, "Ascend 910B3"),
    ]
    two = "NPU ID Chip ID Chip Logic ID Chip Phy-ID Chip Name\n7 1 1 15 Ascend910\n7 0 0 14 Ascend910\n7 2 - - Mcu\n"
    assert [(m.chip, m.logical, m.physical) for m in smi_text.mapping(two)] == [(0, 0, 14), (1, 1, 15)]


def test_the_matrix_with_and_without_processors() -> None:
    text = "\t   NPU0       NPU1       CPU Affinity\nNPU0  X  HCCS  144-167\nNPU1  HCCS  X  0-23,48-71\n\nLegend:\n  X = Self\n"
    found = smi_text.topology(text)
    assert found.paths == {(0, 1): "HCCS", (1, 0): "HCCS"}
    assert found.affinity == {0: "144-167", 1: "0-23,48-71"}
    dies = smi_text.topology("           Phy-ID12   Phy-ID13\nPhy-ID12   X          SIO\nPhy-ID13   SIO        X\n")
    assert dies.paths == {(12, 13): "SIO", (13, 12): "SIO"}
    assert dies.affinity == {}
    assert smi_text.topology("\tNPU6  CPU Affinity\nNPU6  X  0-23\n").affinity == {6: "0-23"}


@pytest.mark.parametrize("language", ["en", "zh"])
@pytest.mark.parametrize("profile", ["atlas-a2x8", "atlas-a3x16"])
def test_the_language_of_labels_changes_nothing(profile: str, language: str) -> None:
    told = load_profile(profile)
    other = {**told, "language": language}
    for write, read in (
        (smi_output.info, smi_text.chips),
        (smi_output.info, smi_text.versions),
        (smi_output.mapping, smi_text.mapping),
        (smi_output.topology, smi_text.topology),
    ):
        assert read(write(other)) == read(write(told))
    assert smi_text.translated(smi_output.info(other)) is (language == "zh")


def test_fields_split_at_the_first_colon_of_either_kind() -> None:
    found = smi_text.fields("\tPCIe Bus Info : 0000:C1:00.0\n\t固件版本\uff1a7.8.0\n\tClass ID : NA\n")
    assert smi_text.field(found, "PCIe Bus Info") == "0000:C1:00.0"
    assert smi_text.field(found, "Firmware Version", "固件版本") == "7.8.0"
    assert smi_text.field(found, "Class ID") is None
    assert smi_text.field(found, "Software Version") is None


@pytest.mark.parametrize(
    ("name", "has_physical_id", "expected"),
    [
        ("910B3", False, A2),
        ("Ascend 910B2C", False, A2),
        ("Ascend910_9382", False, A3),
        ("910C", False, A3),
        ("Ascend910", True, A3),
        ("Ascend910", False, None),
        ("910ProB", False, None),
        ("910A", False, None),
        ("310P3", False, None),
    ],
)
def test_generations_by_name(name: str, has_physical_id: bool, expected: object) -> None:
    assert generation_of(name, has_physical_id) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("25.5.1", "25.5.1"),
        ("24.1.rc3.7", "24.1rc3"),
        ("8.3.RC1", "8.3rc1"),
        ("24.1.rc1.b030", "24.1rc1"),
        ("2.10.0.post4", "2.10.0"),
    ],
)
def test_versions_as_the_vendor_writes_them(text: str, expected: str) -> None:
    assert str(parse(text)) == expected


def test_order_of_versions_is_not_that_of_texts() -> None:
    assert older("9.0.0", "10.0.0")
    assert older("8.3.RC1", "8.3.0")
    assert not older("8.10.0", "8.3.rc1")
    assert not older(None, "8.3.rc1")
    assert parse("unknown") is None
