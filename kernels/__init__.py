"""Implementations under test: one package per operator. Importing a package registers its kernels."""
