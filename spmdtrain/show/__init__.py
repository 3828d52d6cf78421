"""Draws and lists what a run will do before it starts: shardings, meshes and memory."""
