"""DSA's attention path on the operators of ``mindspeed_dsa.ops``."""
