"""Opens models by name: ours and those of Hugging Face; adapters, chat templates, export, import of nanochat's. The
only package that imports transformers and peft."""
