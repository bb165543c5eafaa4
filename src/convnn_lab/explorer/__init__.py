"""Seeing what a layer looks at: an explorer page, figures of neighbours, and reports of runs.

Nothing here imports torch before there is work to do; see :mod:`convnn_lab.explorer.commands`.
"""
