"""Speed on this machine, beside its measured limits. What the times are is the machine's matter, not a test's."""
