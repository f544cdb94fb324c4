//! Whether weights, KV caches and buffers fit, before any of them is allocated.

use super::StartError;
use crate::config::ByteSize;

/// What the workers of one process will take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Footprint {
    pub(super) weights: u64,
    pub(super) kv: u64,
    pub(super) scratch: u64,
    pub(super) workers: u64,
}

impl Footprint {
    fn total(&self) -> u64 {
        let each = self.kv.saturating_add(self.scratch);
        self.weights.saturating_add(each.saturating_mul(self.workers))
    }

    /// Refuses what `available` bytes cannot hold.
    pub(super) fn check(&self, available: u64) -> Result<(), StartError> {
        let needed = self.total();
        if needed <= available {
            return Ok(());
        }
        Err(StartError::Memory {
            weights: ByteSize(self.weights),
            workers: self.workers,
            kv: ByteSize(self.kv),
            scratch: ByteSize(self.scratch),
            needed: ByteSize(needed),
            available: ByteSize(available),
        })
    }
}

/// Bytes that this process may still take: the machine's estimate, or what its control groups leave where that is less.
/// None where the system does not say.
pub(super) fn available_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let machine = read("/proc/meminfo").and_then(|text| meminfo_available(&text));
    let groups = read("/proc/self/cgroup").unwrap_or_default();
    machine.into_iter().chain(group_folders(&groups).iter().filter_map(|f| f.available(&read))).min()
}

/// Files of one control group, in the words of its version.
#[derive(Clone, Debug, PartialEq)]
struct GroupFolder {
    path: String,
    version: u8,
}

/// Folders where limits of this process may stand. In a container the group's own path is not visible, but it is mounted
/// as the root.
fn group_folders(cgroup: &str) -> Vec<GroupFolder> {
    let mut folders = Vec::new();
    for line in cgroup.lines() {
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let (root, version) = match controllers {
            "" => ("/sys/fs/cgroup", 2),
            names if names.split(',').any(|name| name == "memory") => ("/sys/fs/cgroup/memory", 1),
            _ => continue,
        };
        folders.push(GroupFolder { path: root.to_owned(), version });
        if path != "/" {
            folders.push(GroupFolder { path: format!("{root}{path}"), version });
        }
    }
    folders
}

impl GroupFolder {
    /// Limit less what is used and cannot be dropped. File pages that nobody maps right now are as good as free.
    fn available(&self, read: &impl Fn(&str) -> Option<String>) -> Option<u64> {
        let [limit, usage, droppable] = match self.version {
            2 => ["memory.max", "memory.current", "inactive_file"],
            _ => ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"],
        };
        let number = |name: &str| read(&format!("{}/{name}", self.path))?.trim().parse::<u64>().ok();
        let stat = read(&format!("{}/memory.stat", self.path)).unwrap_or_default();
        let droppable = stat
            .lines()
            .find_map(|line| line.strip_prefix(droppable)?.trim().parse::<u64>().ok())
            .unwrap_or_default();
        let used = number(usage).unwrap_or_default().saturating_sub(droppable);
        number(limit).map(|limit| limit.saturating_sub(used))
    }
}

fn meminfo_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok().map(|kib| kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_the_numbers() {
        let footprint = Footprint { weights: 100 << 20, kv: 512 << 20, scratch: 20 << 20, workers: 2 };
        assert!(footprint.check((100 + 2 * 532) << 20).is_ok());
        let error = footprint.check(1 << 30).unwrap_err().to_string();
        for part in [
            "100MiB of weights",
            "2 x 512MiB of KV",
            "1.1GiB",
            "1GiB are available",
            "--kv-cache-memory-bytes",
        ] {
            assert!(error.contains(part), "{error:?} lacks {part:?}");
        }
        assert!(Footprint { kv: u64::MAX, ..footprint }.check(u64::MAX - 1).is_err());
    }

    #[test]
    fn meminfo() {
        let text = "MemTotal:       24684084 kB\nMemFree: 1 kB\nMemAvailable:   23485148 kB\n";
        assert_eq!(meminfo_available(text), Some(23_485_148 << 10));
        assert_eq!(meminfo_available("MemTotal: 1 kB\n"), None);
    }

    fn check(cgroup: &str, files: &[(&str, &str)], expected: Option<u64>) {
        let read = |path: &str| files.iter().find(|(p, _)| *p == path).map(|(_, text)| (*text).to_owned());
        let folders = group_folders(cgroup);
        assert_eq!(folders.iter().filter_map(|f| f.available(&read)).min(), expected, "{cgroup:?} {files:?}");
    }

    #[test]
    fn control_groups() {
        let unlimited = [("/sys/fs/cgroup/memory.max", "max\n"), ("/sys/fs/cgroup/memory.current", "5\n")];
        check("0::/\n", &unlimited, None);
        check("0::/\n", &[], None);
        check("", &[], None);
        let limited = [
            ("/sys/fs/cgroup/pod/memory.max", "1000\n"),
            ("/sys/fs/cgroup/pod/memory.current", "700\n"),
            ("/sys/fs/cgroup/pod/memory.stat", "anon 100\ninactive_file 600\nactive_file 0\n"),
        ];
        check("0::/pod\n", &limited, Some(900));
        let first = [
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "1000\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1500\n"),
        ];
        check("4:cpu,memory:/a/b\n0::/\n", &first, Some(0));
    }
}
