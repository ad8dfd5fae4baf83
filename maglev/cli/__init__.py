"""The command line: verbs to functions, one small file per verb group. Only verbs import torch."""
