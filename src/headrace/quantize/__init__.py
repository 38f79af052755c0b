"""`headrace quantize`: writes a checkpoint with weights of eight or four bits, and measures what it costs.

quantize.py     reads a checkpoint, quantizes its matrices and writes them: the command's one call
calibrate.py    runs the model over text and records what its matrices are multiplied with
compensation.py rounds to four bits or FP8 with error compensation (GPTQ)
folding.py      moves scales of input channels out of a matrix and into what computes its input
stored.py       the tensors and the config.json of a quantized matrix, in the layout of compressed-tensors
output.py       an output directory that appears whole or not at all
evaluate.py     perplexity, and agreement of the most likely tokens, before and after
"""
