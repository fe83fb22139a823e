# Turns a Debian root directory ($TREE) into that of a kind node, with the static
# files of kind's base image ($FILES).
cp -r --no-preserve=mode,ownership "$FILES"/. "$TREE"/
chmod 0755 "$TREE"/usr/local/bin/* "$TREE"/kind "$TREE"/kind/bin "$TREE"/kind/bin/*
# Debian's containerd and shim are in /usr/bin.
sed -i 's#/usr/local/bin/containerd#/usr/bin/containerd#; /^OOMScoreAdjust/d; /^Limit/d' "$TREE"/etc/systemd/system/containerd.service
# On few cores, a third of what many programs cost while they have nothing to do wakes further
# threads: here, and in the containers (below).
for unit in kubelet containerd; do
	mkdir -p "$TREE/etc/systemd/system/$unit.service.d"
	printf '[Service]\nEnvironment=GOMAXPROCS=1\n' >"$TREE/etc/systemd/system/$unit.service.d/20-threads.conf"
done
# Machines without CAP_SYS_RESOURCE cannot lower an OOM score; the lab does not need it.
sed -i "s#restrict_oom_score_adj = false#restrict_oom_score_adj = true#; s#sandbox_image = .*#sandbox_image = \"$PAUSE\"#" "$TREE"/etc/containerd/config.toml
grep -q 'restrict_oom_score_adj = true' "$TREE"/etc/containerd/config.toml
find "$TREE"/lib/systemd/system/sysinit.target.wants/ -name systemd-tmpfiles-setup.service -delete
rm -f "$TREE"/lib/systemd/system/multi-user.target.wants/* "$TREE"/etc/systemd/system/*.wants/* \
	"$TREE"/lib/systemd/system/local-fs.target.wants/* "$TREE"/lib/systemd/system/sockets.target.wants/*udev* \
	"$TREE"/lib/systemd/system/sockets.target.wants/*initctl* "$TREE"/lib/systemd/system/basic.target.wants/*
echo ReadKMsg=no >>"$TREE"/etc/systemd/journald.conf
ln -sf /usr/lib/systemd/systemd "$TREE"/sbin/init
chroot "$TREE" systemctl enable kubelet.service containerd.service undo-mount-hacks.service
chroot "$TREE" systemctl mask systemd-binfmt.service
mkdir -p "$TREE"/etc/kubernetes/manifests "$TREE"/kind
printf %s "$KUBERNETES" >"$TREE"/kind/version
chroot "$TREE" ctr oci spec | chroot "$TREE" jq '
	.hooks.createContainer[.hooks.createContainer | length] |= . + {"path": "/kind/bin/mount-product-files.sh"}
	| .process.env += ["GOMAXPROCS=1"] | del(.process.rlimits)' >"$TREE"/etc/containerd/cri-base.json
test -s "$TREE"/etc/containerd/cri-base.json
rm -rf "$TREE"/var/cache/apt/* "$TREE"/var/lib/apt/lists/* "$TREE"/usr/share/doc/* "$TREE"/usr/share/man/* "$TREE"/usr/share/locale/*
# kind sets the host name and machine ID of each node.
rm -f "$TREE"/etc/hostname
: >"$TREE"/etc/machine-id
