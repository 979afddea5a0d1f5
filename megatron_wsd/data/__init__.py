"""Text to samples, in reading order.

tokenizer -> corpus -> indexed -> prepare -> mix -> deal -> sampler -> consumption -> loader: bytes become
ids, documents become Megatron's .bin/.idx, and those are read at random as one stream of samples whose order
is a pure function of the seed.
Nothing here imports torch or megatron until a file is written or opened.
"""
