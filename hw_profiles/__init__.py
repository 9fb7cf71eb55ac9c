"""One TOML file per target; read by :mod:`staticgen.profiles`."""
