"""The read model of a run: the figures that every screen, page and card shows of it."""
