//! Names image formats that are not read, so that a message can say what a file is and how to convert it.

/// The format of a file that is an image, or near to one, but cannot be decoded.
pub fn name(start: &[u8]) -> Option<&'static str> {
    match start {
        [_, _, _, _, b'f', b't', b'y', b'p', brands @ ..] => {
            let has = |wanted: &[&[u8; 4]]| {
                let brands = &brands[..brands.len().min(64)];
                brands.chunks_exact(4).any(|brand| wanted.iter().any(|wanted| brand == *wanted))
            };
            match () {
                () if has(&[b"avif", b"avis"]) => Some("AVIF"),
                () if has(&[b"heic", b"heix", b"hevc", b"heim", b"heis", b"mif1", b"msf1"]) => Some("HEIC"),
                () => None,
            }
        }
        [0xff, 0x0a, ..] | [0, 0, 0, 12, b'J', b'X', b'L', b' ', ..] => Some("JPEG XL"),
        [0, 0, 0, 12, b'j', b'P', b' ', b' ', ..] | [0xff, 0x4f, 0xff, 0x51, ..] => Some("JPEG 2000"),
        [b'8', b'B', b'P', b'S', ..] => Some("PSD"),
        [0, 0, 1, 0, ..] => Some("ICO"),
        [b'%', b'P', b'D', b'F', ..] => Some("PDF"),
        [0x76, 0x2f, 0x31, 0x01, ..] => Some("OpenEXR"),
        _ if start.trim_ascii_start().starts_with(b"<svg") => Some("SVG"),
        _ => None,
    }
}

/// What is wrong with a file that is not read, from its content.
pub fn problem(file: &[u8]) -> String {
    const READ: &str = "JPEG, PNG, WebP, GIF, BMP, TIFF or PNM";
    match name(file) {
        Some(format) => {
            let ending = match format {
                "JPEG XL" => "jxl",
                "JPEG 2000" => "jp2",
                "OpenEXR" => "exr",
                other => &other.to_ascii_lowercase(),
            };
            // A build with the feature `avif` decodes it and does not get here.
            let why = match format {
                "AVIF" => "needs a build with `--features avif`",
                _ => "is not read",
            };
            format!(
                "it is of the format {format}, which {why}; `magick mogrify -format png *.{ending}` converts it"
            )
        }
        None => {
            let shown: Vec<String> = file.iter().take(4).map(|b| format!("{b:02x}")).collect();
            format!("it is not a {READ} file: it starts with {}", shown.join(" "))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_that_are_not_read_are_named() {
        let avif = b"\0\0\0\x20ftypavif\0\0\0\0avifmif1miafMA1B";
        assert!(problem(avif).contains("AVIF") && problem(avif).contains("*.avif"), "{}", problem(avif));
        // An image of a general brand says what it is among the compatible ones.
        assert_eq!(name(b"\0\0\0\x1cftypmif1\0\0\0\0mif1avif"), Some("AVIF"));
        assert_eq!(name(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"), Some("HEIC"));
        assert_eq!(name(b"\0\0\0\x18ftypisom\0\0\0\0isom"), None);
        assert_eq!(name(b" \n<svg xmlns"), Some("SVG"));
        assert_eq!(
            problem(b"no image"),
            "it is not a JPEG, PNG, WebP, GIF, BMP, TIFF or PNM file: it starts with 6e 6f 20 69"
        );
        assert_eq!(name(b""), None);
    }
}
