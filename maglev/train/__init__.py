"""One training loop for every objective, on one process or many."""
