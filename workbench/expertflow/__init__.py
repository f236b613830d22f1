"""ExpertFlow: route prediction, caching of experts, scheduling of tokens and control of memory, for mixtures of experts whose
weights do not fit. (The seed document and arXiv 2410.17954.)
"""
