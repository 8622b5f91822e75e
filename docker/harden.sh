#!/bin/sh
# What both images share below the dependencies: the user, its folders, and no file that lends rights.
set -eu

# A fixed user. Its group is 0, so that an arbitrary user id of group 0 (OpenShift) may do the same.
useradd --uid 1000 --gid 0 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lockstep

# Volumes take over the owner of the folder they are mounted on. /app is for a model of your own.
mkdir -p /runs /data /app
chown 1000:0 /runs /data
chmod 2775 /runs /data

# Nobody in this image has to become somebody else.
find / -xdev -type f -perm /6000 -exec chmod a-s {} +
