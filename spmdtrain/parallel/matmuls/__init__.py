"""The matmuls of layers: split over `tensor`, in rings beside their transfers, and in 8 bits."""
