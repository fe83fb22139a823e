// Package image builds the container images of the lab without a registry: images
// of a single static binary, and the node image for kind.
package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// File is a file of an image.
type File struct {
	// Path in the image, without the leading slash.
	Path string
	// Source is the file on this machine; Link is the target of a symbolic link.
	// Exactly one is set.
	Source, Link string
}

// Spec describes an image.
type Spec struct {
	// Name with tag, as in a pod's spec.
	Name       string
	Files      []File
	Entrypoint []string
	// User is a numeric user ID, with group ID; root if empty.
	User string
}

// epoch is the modification time of all files.
var epoch = time.Unix(0, 0).UTC()

// Write writes the image as an archive for "docker load" and "ctr images import".
// Equal content results in equal bytes.
func Write(path string, spec Spec) error {
	layer, err := os.CreateTemp(filepath.Dir(path), "layer-*")
	if err != nil {
		return err
	}
	defer os.Remove(layer.Name())
	defer layer.Close()
	diffID, size, err := writeLayer(layer, spec.Files)
	if err != nil {
		return fmt.Errorf("image %s: %w", spec.Name, err)
	}
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"created":      epoch,
		"config": map[string]any{
			"Entrypoint": spec.Entrypoint,
			"User":       spec.User,
			"WorkingDir": "/",
			"Env":        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		},
		"rootfs":  map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + diffID}},
		"history": []map[string]any{{"created": epoch, "created_by": "spillway"}},
	})
	if err != nil {
		return err
	}
	configName := fmt.Sprintf("%x.json", sha256.Sum256(config))
	layerName := diffID + "/layer.tar"
	manifest, err := json.Marshal([]map[string]any{{
		"Config": configName, "RepoTags": []string{spec.Name}, "Layers": []string{layerName},
	}})
	if err != nil {
		return err
	}

	out, err := os.Create(path + ".tmp")
	if err != nil {
		return err
	}
	defer out.Close()
	archive := tar.NewWriter(out)
	if _, err := layer.Seek(0, io.SeekStart); err != nil {
		return err
	}
	for _, part := range []struct {
		name string
		body io.Reader
		size int64
	}{
		{configName, bytes.NewReader(config), int64(len(config))},
		{layerName, layer, size},
		{"manifest.json", bytes.NewReader(manifest), int64(len(manifest))},
	} {
		if err := archive.WriteHeader(&tar.Header{Name: part.name, Mode: 0o644, Size: part.size, ModTime: epoch}); err != nil {
			return err
		}
		if _, err := io.Copy(archive, part.body); err != nil {
			return err
		}
	}
	if err := archive.Close(); err != nil {
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Rename(path+".tmp", path)
}

func writeLayer(w io.Writer, files []File) (diffID string, size int64, err error) {
	sum := sha256.New()
	count := new(counter)
	layer := tar.NewWriter(io.MultiWriter(w, sum, count))
	made := map[string]bool{".": true}
	var mkdir func(dir string) error
	mkdir = func(dir string) error {
		if made[dir] {
			return nil
		}
		if err := mkdir(filepath.Dir(dir)); err != nil {
			return err
		}
		made[dir] = true
		mode := int64(0o755)
		if dir == "tmp" {
			mode = 0o1777
		}
		return layer.WriteHeader(&tar.Header{Typeflag: tar.TypeDir, Name: dir + "/", Mode: mode, ModTime: epoch})
	}
	for _, f := range files {
		if err := mkdir(filepath.Dir(f.Path)); err != nil {
			return "", 0, err
		}
		if f.Link != "" {
			if err := layer.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: f.Path, Linkname: f.Link, Mode: 0o777, ModTime: epoch}); err != nil {
				return "", 0, err
			}
			continue
		}
		if err := addFile(layer, f); err != nil {
			return "", 0, err
		}
	}
	if err := layer.Close(); err != nil {
		return "", 0, err
	}
	return hex.EncodeToString(sum.Sum(nil)), int64(*count), nil
}

func addFile(layer *tar.Writer, f File) error {
	source, err := os.Open(f.Source)
	if err != nil {
		return err
	}
	defer source.Close()
	info, err := source.Stat()
	if err != nil {
		return err
	}
	mode := int64(0o644)
	if info.Mode()&fs.FileMode(0o111) != 0 {
		mode = 0o755
	}
	if err := layer.WriteHeader(&tar.Header{Name: f.Path, Mode: mode, Size: info.Size(), ModTime: epoch}); err != nil {
		return err
	}
	_, err = io.Copy(layer, source)
	return err
}

type counter int64

func (c *counter) Write(p []byte) (int, error) {
	*c += counter(len(p))
	return len(p), nil
}
