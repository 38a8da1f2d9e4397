"""Graph storage: conversion, features on disk, partitions, several machines, and memory shared by ranks."""
