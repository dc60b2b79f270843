//! Sets of pictures in files.

use std::path::Path;

use super::{Failure, Sets};
use crate::data::Opening;
use crate::data::idx::{self, Idx};
use crate::job;

pub(super) fn idx(s: &job::Idx, opening: &Opening) -> Result<Sets, Failure> {
    let open = |images: &Path, labels: &Path| {
        Idx::open(&idx::Files {
            images: images.to_owned(),
            labels: labels.to_owned(),
            classes: (0..s.classes).map(|class| class.to_string()).collect(),
            normalise: Some(idx::Normalise { mean: s.mean as f32, std: s.std as f32 }),
            max_bytes: opening.max_bytes,
        })
    };
    Ok(Sets::of(open(&s.train_images, &s.train_labels)?, open(&s.valid_images, &s.valid_labels)?))
}
