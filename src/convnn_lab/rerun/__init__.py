"""The tables of the thesis, trained again: which runs a row needs, running them, and what came of it."""
