"""What a tray adds to cuda's rates: its links to the host. Per device and in one direction; nothing was measured with vime."""

from __future__ import annotations

from vime.facts.inventory import NodeInventory
from vime.facts.perf import PerfTable, Provenance, Quantity

C2C_LOCAL_BYTES_PER_S = 330e9
C2C_REMOTE_BYTES_PER_S = 115e9
GRACE_MEMORY_BYTES_PER_S = 500e9
SCALE_UP_BYTES_PER_S = 18 * 40.1e9
"""18 links at the rate that NCCL plans with for one of this generation: 722e9. Their line rate is 900e9."""

HOST_LINKS = {
    "host_link": Quantity(
        C2C_LOCAL_BYTES_PER_S,
        "bytes/s",
        Provenance.MEASURED,
        "NVLink-C2C to the Grace of the device while no other device copies: users of torchtitan measured 330 to 350 GB/s",
    ),
    "host_memory": Quantity(
        GRACE_MEMORY_BYTES_PER_S, "bytes/s", Provenance.SPEC, "LPDDR5X of one Grace, which its two devices share (data sheet)"
    ),
    "host_link_remote": Quantity(
        C2C_REMOTE_BYTES_PER_S,
        "bytes/s",
        Provenance.MEASURED,
        "to the other Grace of the tray: users of torchtitan measured 115 to 120 GB/s",
    ),
}

MATMUL = Quantity(
    2.5e15,
    "FLOP/s",
    Provenance.DERIVED,
    "NVIDIA's data sheet of the NVL72 rack, bfloat16: 180 PFLOP/s without sparsity / 72 devices",
)


def table(found: PerfTable, inventory: NodeInventory) -> PerfTable:
    """cuda's rates with those of this board. Pure."""
    rates = {**found.quantities, **HOST_LINKS}
    if found.get("matmul").value is None and {device.arch for device in inventory.devices} == {"sm103"}:
        rates["matmul"] = MATMUL
    return PerfTable(rates)
