"""Which rank holds which expert, chosen from recorded loads."""
