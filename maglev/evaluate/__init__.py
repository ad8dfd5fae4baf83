"""Measure a run. Every number says where its memories came from."""
