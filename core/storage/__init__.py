"""Where records are kept and how they are read back."""
