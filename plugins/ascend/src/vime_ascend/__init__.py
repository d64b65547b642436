"""vime on Huawei Ascend NPUs: Atlas A2 and A3."""
