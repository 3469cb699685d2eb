"""Flags of MindSpeed and MindSpeed-LLM: what serves each of them here, and launch scripts rewritten."""
