"""The stub policy of a dry run: answers that fit what each call asks for."""
