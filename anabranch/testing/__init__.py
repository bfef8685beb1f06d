"""What every strategy, sampler, admission policy, tier, message format and optimizer promises, as checks.

In: an import string, or a function that makes one. Out: which promises are kept. Ours pass the same checks in tests.
"""
