"""Operators of DeepSeek Sparse Attention: tensors in, tensors out, no Megatron.

One folder per operator, whose ``__init__`` holds the public functions:

* :mod:`mindspeed_dsa.ops.lightning_indexer`: select keys by index score,
* :mod:`mindspeed_dsa.ops.sparse_flash_attention`: attend to the selected keys,
* :mod:`mindspeed_dsa.ops.indexer_kl_loss`: train the indexer on the attention it replaces.
"""
