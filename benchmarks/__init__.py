"""What the workbench costs, measured against what it is compared with in the same run: `python -m benchmarks`."""
