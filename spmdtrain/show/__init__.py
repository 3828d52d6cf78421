"""Pictures and tables of what has not run: shardings, meshes and memory."""
