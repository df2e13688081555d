"""Recipes of the checkpoints that a real vLLM serves in tests: no calibration, and every kernel that the CPU has."""

INT4_AND_INT8 = """
version: 1
name: int4-int8
summary: int4 g32 for the decoder and int8 for the PLE linears, rounded to nearest
method: rtn
rules:
  - match: [ple]
    scheme: {weights: {num_bits: 8, strategy: channel}}
  - match: [decoder]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
"""

INT4 = """
version: 1
name: int4
summary: int4 g32 for the decoder, rounded to nearest
method: rtn
rules:
  - match: [decoder]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
"""
