"""Fused DSA in Megatron releases that call it in another way than 0.16 to 0.18 do."""
