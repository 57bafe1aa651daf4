"""The paper's models, one file each, shared by tests, examples and benchmarks."""
