"""Models: GGUF reading, tokenizer, the transformer graphs, generation (llama.cpp)."""
