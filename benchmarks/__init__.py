"""Benchmarks side by side with the peers: `make bench-quantize`, `make bench-quality`.

Results go into docs/benchmarks.md by hand, with date and machine."""
