"""Opens a model by name: ours, of Hugging Face, of nanochat; adapters, templates, export. Owns transformers and
peft."""
