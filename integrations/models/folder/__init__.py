"""Model folders in Hugging Face form."""
