"""Where plan meets device, and front meets engine. Import what you need from the modules: some need torch."""
