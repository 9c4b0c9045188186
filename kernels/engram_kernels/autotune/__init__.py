"""Offline search of launch parameters on the GPU at hand: every candidate is checked before it is timed.

A tile shape can be right in the interpreter and on one GPU and wrong on another, so nothing is taken on trust: a
candidate's output is compared with a higher precision first. `search` knows no op; `linear`, `experts` and `attention`
say what there is to try and on which operands; `driver` goes through a model, `ahead` compiles for it in other
processes; `store` keeps what was found per GPU and Triton version, where `engram_kernels.tuning` looks it up.
"""
