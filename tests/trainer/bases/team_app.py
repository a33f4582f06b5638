"""The tiny application as a module."""

from tests.trainer.tiny_app import application

solve = application()
