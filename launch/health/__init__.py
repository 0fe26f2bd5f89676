"""What a bug report needs to know of this machine: each check gives a section of facts and problems."""
