"""Weights on their way into a decoder.

    source.py               the protocol of every source, and the check of its tensors against the spec
    file_reader.py          parts of files, read by several threads to their place or through a few buffers
    safetensors_files.py    tensors of a directory's safetensors, and parts of them
    rearranged.py           the same under Llama's names, from checkpoints that fuse, rename or transpose tensors
    quantized_files.py      matrices of quantized safetensors, as stored or dequantized; stored_linear.py joins them
    gguf_tensors.py         tensors of a GGUF file; dequantize.py turns their storage types into float32, gguf_groups.py
                            into integers with scales, as a CPU multiplies them
    random_weights.py       random weights, to measure a model from its config alone
    gemma3n.py              what Gemma 3n has beside other decoders
    reader.py               reads each matrix into its final tensor and packs it (`ops.pack_linear`)
    load.py                 builds the decoder: load_layers.py, load_ends.py (embeddings and heads), load_recurrent.py
    load_encoder.py         builds an encoder; head_files.py: heads that sentence-transformers keeps in folders
    adapter_files.py        LoRA adapters as PEFT writes them
    gguf_names.py           what the tensors of a GGUF file are called
    joined_norms.py, mxfp4.py   what single families store in another way
    key_units.py            the units of keys in an FP8 cache, computed from weights
    read_ahead.py           reads pieces of files ahead of their use
    host_layers.py, layer_file.py   layers that stay in host memory, or in a file on a disk
    no_files.py, shapes_only.py     sources without files: random weights, and shapes for a start that computes nothing

A tensor is read straight into its final type and device, one matrix at a time: the peak memory is the model, one
matrix (that packing copies) and 32 MiB of buffers. Every tensor of the checkpoint must be used, or known to be
harmless. `quantization` quantizes the layers' matrices here; see kernels/gpu/fp8.py and kernels/quantized.py.
"""
