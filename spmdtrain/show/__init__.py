"""Pictures and tables of a run before it starts: shardings, meshes and memory."""
