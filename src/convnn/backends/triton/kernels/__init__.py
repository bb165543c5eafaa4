"""The kernels; importing one of these modules imports Triton."""
