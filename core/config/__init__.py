"""The settings of a training run: one tree of structs, as a TOML file and run.json hold them."""
