//! Renamed keys: the old name gets a hint, and a run trained with it can be resumed.

/// Old and new dotted key.
const RENAMED: [(&str, &str); 3] = [
    ("data.valid_share", "data.valid_fraction"),
    ("data.crop_share", "data.crop_fraction"),
    ("schedule.warmup_share", "schedule.warmup_fraction"),
];

/// The new name of a dotted key, if it was renamed.
pub(super) fn renamed(key: &str) -> Option<&'static str> {
    RENAMED.iter().find(|(old, _)| *old == key).map(|(_, new)| *new)
}
