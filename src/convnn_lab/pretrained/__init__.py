"""Networks other people trained, as plain torch modules: their files are read from a folder, never downloaded.

The folder holds ``models/`` (safetensors), ``cifar10/``, ``mnist/`` and ``resnet50/``. What they were tested on is in
:mod:`convnn_lab.pretrained.scores`; ``benchmarks/pretrained.py`` converts them and counts what they still know.
"""
