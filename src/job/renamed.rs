//! Keys that were renamed: an old name gets a hint, and a run made with it resumes.

/// Old and new dotted key.
const RENAMED: [(&str, &str); 3] = [
    ("data.valid_share", "data.valid_fraction"),
    ("data.crop_share", "data.crop_fraction"),
    ("schedule.warmup_share", "schedule.warmup_fraction"),
];

/// The dotted key that `key` is called now, if it was renamed.
pub(super) fn renamed(key: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(old, _)| *old == key).map(|(_, new)| *new)
}
